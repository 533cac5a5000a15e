"""Scripts of this repository. They are not installed with the package."""
