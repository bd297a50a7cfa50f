"""Programs that every node of a job runs, under every launcher that uses nodes.

agent, bind and host_facts are programs that are copied to the hosts and run there without this
package. script renders node.sh around them. binding makes a job's ranks start through bind.
"""
