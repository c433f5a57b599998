"""`pyllm bench`: requests, times and reports, and the same requests in other engines."""
