"""The cost model: seconds and bytes of layouts, as columns."""
