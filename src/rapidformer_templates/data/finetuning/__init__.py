"""Fine-tuning data: tables, conversations and labels."""
