"""Everything that is asked before a job starts, one function per question; nothing is built and nothing changed."""
