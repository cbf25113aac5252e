"""``hiddenstore run``: a recipe file as the commands it stands for, resumable at every stage."""
