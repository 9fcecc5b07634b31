"""The loop under fire: processes of a whole stack are killed at random, and nothing may be lost."""
