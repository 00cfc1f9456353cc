"""Published data sets as the library reads them, and the guard of test questions."""
