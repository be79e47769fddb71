"""The run folder, and reports on runs: figures, pictures, comparisons and progress."""
