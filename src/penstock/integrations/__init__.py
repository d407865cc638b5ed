"""Penstock inside of other libraries' training loops; each module imports its library."""
