"""What a layer computes: operations over named dimensions, and what axes and recipes do to them."""
