"""Actions, programs, rules and schedules, as frozen data; never imports torch."""
