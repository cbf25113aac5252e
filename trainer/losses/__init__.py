"""What is taught: teachers, slots, losses fused with the head, and the objectives made of them."""
