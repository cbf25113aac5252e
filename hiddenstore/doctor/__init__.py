"""What ``hiddenstore doctor`` says of this machine and this installation."""
