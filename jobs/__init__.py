"""Stores jobs and runs them. A job is a command to run once, such as the retraining of a pipeline.

These terms have one meaning in all modules:

- A *pipeline* is a model that follows a dataset. A *plain command* is a job that belongs to no
  pipeline.
- A *delivery* is a request that a hub sends to a webhook after a change, such as a push.
- A *push job* belongs to a pipeline and was not submitted by hand: a delivery led to it. A job *by
  hand* was submitted by a person.
- An *attempt* is one start of a job's command. If the attempt fails for a temporary cause or is
  lost, the job normally gets another attempt.
- An attempt is *lost* if its runner was stopped before the attempt wrote an outcome. It is also
  lost if its process vanished or was killed before that. (A kill by the runner itself, for example
  at the time limit, does not count.) There is one exception: if a plain command was killed, its
  attempt is not lost, and the job has failed.
- A job *answers for* the commits and deliveries that led to it: the outcome of the job is also the
  outcome of these commits and deliveries.
- While a push job is *pending* (not started yet), it *absorbs* later pushes: it answers for their
  commits too, so that one training learns the rows of all these pushes.
- A *runner* takes jobs from the store and runs them. It *leases* each job: for some seconds, no
  other runner may take the job. The runner sends *heartbeats* to the store, and each heartbeat
  extends the lease. If a runner dies, its leases run out, and another runner *adopts* its jobs.
"""
