"""Messages between processes: typed channels, clients, mailboxes."""
