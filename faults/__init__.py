"""The fault harness: break things on purpose and count what held (`make faults`, docs/reliability.md).

A file is a section; the tables of bad input are those of the tests.
"""
