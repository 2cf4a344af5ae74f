"""One file per operation: what it is compared with, and the calls its heuristic is judged by."""
