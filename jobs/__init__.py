"""Stores jobs and runs them. A job is a command to run once, such as the retraining of a pipeline.

These terms have one meaning in all modules:

- A *pipeline* is a model that follows a dataset. A *plain command* is a job that belongs to no
  pipeline.
- A *delivery* is a request that a hub sends to a webhook after a change, such as a push.
- A *push job* belongs to a pipeline and was not submitted by hand: a delivery led to it. A job *by
  hand* was submitted by a person.
- An *attempt* is one start of a job's command. If the attempt fails for a temporary cause or is
  lost, the job normally gets another attempt.
- An attempt is *lost* if one of these things happened before the attempt wrote an outcome: its
  runner was stopped, its process vanished, or somebody other than the runner killed its process.
  (If the runner was stopped, an outcome `failed` or `cancelled` does not count, because the stop
  probably caused it.) But if somebody killed a plain command, the attempt is not lost: the job has
  failed.
- A push job trains on the *head* of its ref (the newest commit). A delivery only says that the
  pipeline is behind: it is linked to the pipeline's *pending* push job (one that has not started
  yet), which is created if there is none. The head is read when a runner takes the job.
- A *runner* takes jobs from the store, and starts an *agent* for each attempt: a process that runs
  the command, and goes on if the runner dies.
- The *lease* of a job gives it to one attempt for some seconds. The agent sends *heartbeats* to the
  store, and each heartbeat extends the lease. If the agent dies, a runner ends the attempt.
"""
