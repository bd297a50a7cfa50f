"""What every node of a job runs, whoever starts it there.

agent, bind and host_facts are programs that travel to the hosts and run there without this package;
script renders node.sh around them, binding has a job's ranks start through bind.
"""
