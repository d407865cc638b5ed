"""What runs when: actions, programs, rules, schedules. Plain frozen data; never imports torch."""
