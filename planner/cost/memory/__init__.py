"""Peak memory of a rank: what it holds, when the peak happens, what the allocator reserves."""
