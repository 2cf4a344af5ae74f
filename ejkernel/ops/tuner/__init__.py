"""How fast is it, and is it right: inputs, judgement, timing and the race between configs."""
