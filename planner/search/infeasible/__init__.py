"""What is said when nothing fits, and the smallest changes that would."""
