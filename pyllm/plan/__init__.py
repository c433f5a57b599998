"""What a model will take, before or beside running it: floors of its ops, memory, scales of an int8 cache."""
