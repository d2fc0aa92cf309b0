"""Model families, built from Hugging Face configs."""
