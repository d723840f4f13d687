"""What is measured: every metric in one table, counted from facts or sampled, never labelled with an agent or a job."""
