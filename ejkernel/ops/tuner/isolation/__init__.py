"""Candidates in a process of their own, and notes of what crashed in this one."""
