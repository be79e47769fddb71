"""What a run leaves behind: its folder, figures, pictures, comparisons and progress."""
