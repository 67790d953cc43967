"""What is shown: the console and tables, results, progress, the roofline's picture; and the files they go to."""
