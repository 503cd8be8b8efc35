"""The legal layouts: domains of each field, enumeration, and why nothing is legal."""
