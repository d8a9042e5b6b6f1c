"""Pages, who owns them, where they are mapped, and how bytes travel between them."""
