"""Change what is served: carry out operators' changes, and keep them.

`server` alone imports it.

- `admin_service`: Changes of what is served, ordered by operators or the fleet file.
"""
