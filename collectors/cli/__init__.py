"""The commands of the collectors, each imported when it runs."""
