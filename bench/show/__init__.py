"""What a person sees: tables, progress, pictures, files of results."""
