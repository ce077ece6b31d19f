"""`relaygen calibrate`: from two servers to a policy, with the evidence."""
