"""One folder per operation: a naive reference, the implementations, the kernel over them."""
