"""Change what is served: operators' routes, and the service that carries out and keeps changes.

`server` alone imports it. Needs the admin key.

- `admin_service`: Changes of what is served, ordered by operators or the fleet file.
- `routes`: Routes `/admin/*` by which operators change what is served.
"""
