"""One folder per operation: a naive reference, the implementations, and the kernel that joins them."""
