"""Tables of the file that keeps responses and chat completions.

responses  one row each: owner, status, input and response as JSON; chat completions have owners of
           their own, so that neither is found where the other is looked for
chats      what a list of chat completions is chosen by
items      which response an item belongs to, for item_reference
events     the frames of background streams, until their response goes
total      one row: how many responses there are, and their bytes
"""

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  id TEXT PRIMARY KEY, owner BLOB NOT NULL, previous TEXT, status TEXT NOT NULL, worker INTEGER,
  cancelled INTEGER NOT NULL DEFAULT 0, streamed INTEGER NOT NULL, used REAL NOT NULL,
  bytes INTEGER NOT NULL, input BLOB NOT NULL, response BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE TABLE IF NOT EXISTS items (
  id TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (id, response)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_response ON items (response);
CREATE TABLE IF NOT EXISTS events (
  response TEXT NOT NULL, number INTEGER NOT NULL, frame BLOB NOT NULL,
  PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chats (
  id TEXT PRIMARY KEY, owner BLOB NOT NULL, made REAL NOT NULL, model TEXT NOT NULL,
  metadata TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON chats (owner, made, id);
CREATE TRIGGER IF NOT EXISTS chat_removed AFTER DELETE ON responses BEGIN
  DELETE FROM chats WHERE id = old.id;
END;
CREATE TABLE IF NOT EXISTS total (responses INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
  UPDATE total SET responses = responses + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER IF NOT EXISTS grown AFTER UPDATE OF bytes ON responses BEGIN
  UPDATE total SET bytes = bytes + new.bytes - old.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
  UPDATE total SET responses = responses - 1, bytes = bytes - old.bytes;
  DELETE FROM items WHERE response = old.id;
  DELETE FROM events WHERE response = old.id;
END;
"""
