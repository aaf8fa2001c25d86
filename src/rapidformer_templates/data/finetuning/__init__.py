"""Tables, conversations and labels."""
