"""Every edge that a person or a disk touches: command line, HTTP, settings, storage."""
