"""Config subclasses and factories that replace nodes of a torchtitan model configuration."""
