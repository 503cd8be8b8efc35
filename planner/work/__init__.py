"""Work of a layer: operations over named dimensions, changed by axes and recipes."""
