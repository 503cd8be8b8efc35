"""Plans and estimates on SQLite or PostgreSQL."""
