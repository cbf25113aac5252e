"""Everybody's printer: output, progress, tables and clean text; knows no command."""
