"""embedding: a table's rows by their ids, and the gradient of the rows that were looked up."""
