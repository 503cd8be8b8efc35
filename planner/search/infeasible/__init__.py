"""When nothing fits: the report, and the smallest changes after which something would."""
