"""What the commands do, without their options and their printing."""
