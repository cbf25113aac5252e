"""Drafters out to engines and in from others: what engines read and drafters write and read.

A new engine is a line in ``ENGINES`` and rows in the drafters it reads; a new drafter is one `DrafterExport`, which its
kind carries.
"""
