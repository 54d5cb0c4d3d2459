-- Schema 3: batches.

-- What is kept of a batch while its runs come and go, as JSON; `first_id` is its first job.
CREATE TABLE batches (
    first_id INTEGER PRIMARY KEY,
    body TEXT NOT NULL
);

CREATE INDEX submissions_first ON submissions (first_id);
