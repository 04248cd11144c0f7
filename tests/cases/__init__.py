"""Faults that real users met, as black-box cases; docs/cases.md says which test shows which."""
