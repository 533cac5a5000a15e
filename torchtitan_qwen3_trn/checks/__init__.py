"""Checks before a job starts, one function per question; they build nothing and change nothing."""
