"""Stores jobs and runs them. A job is a command to run once, such as the retraining of a pipeline.

These terms have one meaning in all modules:

- An *attempt* is one start of a job's command. A job has several attempts if an attempt fails for a
  temporary cause, or if its process is lost.
- A *plain command* is a job that belongs to no pipeline.
- A *push job* is a job of a pipeline that a webhook's delivery created. A job *by hand* was
  submitted by a person.
- While a push job is *pending* (not started yet), it *absorbs* later pushes: it takes their commits
  over, so that one training learns them all.
- A *runner* takes jobs from the store and runs them. It *leases* each job for some seconds, and
  extends the lease by heartbeats.
"""
