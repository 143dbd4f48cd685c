"""Functions and classes of the user's in processes of their own, which can be killed and replaced."""
