"""What a user of pipelines must be able to trust, asked of fxpipe and of torch alike.

`python -m benchmarks.trust` runs every case on real processes over gloo with both packages and
prints a table. A case passes if the pipeline gives the plain model's results or, where the case
is a mistake, if every rank raises within the limit. The code of a case is the same for both
packages: it uses the names that they share.
"""
